r"""The grammar of an answer that names one option of a multiple-choice question, in words or by its letter.

Names are marked first: (B) stands for the letter B, however it is written, and {B} for the text of option B. The
grammar of the marked answer, ignoring case, is:

    answer    = clause {("." | ";" | "!" | "," | "but" | "so" | "because" | "rather than" | ..) clause}
    name      = ["option"] (B) | [article] {B} | ["option"] (B) {B} | {B} "(" ["option"] B ")"
    subject   = ["the" | "my" | ..] {"correct" | "final" | ..} ("answer" | "option" | "choice" | ..)
    statement = name
              | subject ["is" | ":" | ..] name
              | name ("is" | "it is" | "seems" | "fits" | ..) ["the"] {"correct" | ..} ["answer" | "option" | ..]
              | ("I" | "we" | "let's") ("choose" | "pick" | ..) name
              | ["it" | "that" | "this"] ("is" | "must be" | .. | "leaves") name
    denial    = ["it" | subject] ("is not" | "cannot be" | "neither" | "rather than" | ..) name {("or" | "nor") name}
              | name {("and" | "or" | ..) name} words with "not", "wrong", "ruled out" ..

The answer names an option if its statements name this one only, and no denial does. Other clauses may name others only
after "because" and the like or, without a word of doubt, beside a statement of the second, third or fourth form.
So "A or B", "probably B", "all of the above", "B. No, wait" and "(A) dog", where A is a cat, name none. After "wait",
"no" or "actually" at the start of a clause, only what follows counts, as after a list of options. An option's text
beside words of the question, as in "The animal is a dog" and "3 cars", is a name if nothing is stated: their endings,
"is" and the like do not count, and their order does beside a relation. Case, final stops, markup and spaces do not
count unless they tell two texts apart; a number in words is its digits. A few words after a name that are neither a
sentence nor of its option's text contradict it, as in "The answer is B. purple dog", where B is "blue dog".
`chinese.py` puts an answer in Chinese into the words of this grammar first.

A letter is ASCII and stands alone. Lower-case letters and I count only where a name must follow, and the A of "A dog"
is an article. The rewards read no answer of more than 1000 characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from string import ascii_uppercase
from typing import Final

from mmrl.answer.language import ARTICLES, CHOICE_NOUNS, CHOICE_VERBS, CONCLUSIONS, HEDGES, LATEX_TEXT, REASONS, WRONG
from mmrl_rewards.chinese import MEASURES, names_thing, to_english
from mmrl_rewards.number_words import BELOW_100, split_number
from mmrl_rewards.vocabulary import IN_IMAGE, asked_in, content_words, is_denied, is_doubtful

# Anything else, after a name, is taken for the text of an option.
_SENTENCE: Final = re.compile(
    r"(?:and )?(?:i|we|it|they|he|she|this|that|which|there|the (?:\S+ )+?(?:is|are|was|were|has|shows?))(?!\w)"
    r"|(?!and |or )(?:\S+ ){3}\S|(?:ok(?:ay)?|well|done|thanks|thank you|explanation|reason(?:ing)?"
    r"|conclusion|result|of course|(?:for )?sure|(?:obvious|clear|certain|definite|absolute|sure|undoubted|exact)ly)$",
    re.IGNORECASE,
)
_LISTED_OPTION: Final = re.compile(
    r"^[ \t]*(?:[-*\u2022][ \t]+)?(?:option[ \t]+)?[(\[<]?([A-Z])(?:[.):\]>\u3001]|[ \t]+-(?=[ \t]))[ \t]*(\S.*)$",
    re.MULTILINE | re.IGNORECASE,
)
_NUMBER_WORDS: Final = {str(number): word for word, number in BELOW_100.items() if number > 1}  # "one" is a pronoun
_MARKUP: Final = re.compile(
    rf"\\(?:boxed|{LATEX_TEXT})\{{([^{{}}]*)\}}"
    r"|\*\*([^*]*)\*\*|__([^_]*)__"
    r"|\*([^*]+)\*|`([^`]*)`|(?<!\\)\$([^$]*)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|^#+ (.*)"
)
_FRACTION: Final = re.compile(r"\\[dt]?frac\{(\w+)\}\{(\w+)\}")
_DEGREE: Final = re.compile(r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ\b)")
_EXPONENT: Final = re.compile(r"(?<=\^)\{([+-]?\w+)\}")
_DEGREES: Final = re.compile(r"(?<=[0-9]) ?deg(?:rees?|\.)?(?![^\W_])", re.IGNORECASE)
_LATEX_SPACE: Final = re.compile(r"\\[,;: ]|(?<=\w)~|\\(?=[$%])")
_STRAIGHT: Final = str.maketrans(
    "\u2018\u2019\u3002\uff0c\uff1a\uff1b\uff01\uff1f\uff08\uff09\u2212\uff0e", "''.,:;!?()-."
)
_QUOTE: Final = re.compile(r"[\"\u201c\u201d]|(?<!\w)'|'(?!\w)")
_LETTER: Final = re.compile(r"[(\[]?([A-Za-z])[)\]]?[.:!,]?")
_THAT_IS: Final = re.compile(r"\b(?:i\.e|e\.g)\.,? ?|\u2220", re.IGNORECASE)  # and the sign of an angle
_NOT_IN_BRACKETS: Final = re.compile(r" \((not [^()]+)\)")  # Paris (not London)
_UNLISTED: Final = re.compile(r"^[(\[]?[A-Za-z][)\].:](?= (?!(?:is|are|was|and|or|nor|can\w*|isn't)\b)\w)")
_ARTICLE: Final = re.compile(rf"^(?:{ARTICLES}) ", re.IGNORECASE)

_LETTER_IN_TEXT: Final = re.compile(
    r"[(\[]([A-Za-z])[)\]]|(?<![\w'{])([A-Za-z])\)|(?<![\w'{])([B-HJ-Z])(?![\w'])"
    # Lower-case letters, and I, where a name has to be.
    r"|^([a-z])(?=[.:] )"
    r"|(?:(?<= is )|(?<= be )|(?<=: )|(?<= or )|(?<= nor ))([a-zI])(?=[ .,;!]*(?:$|[.,;] | (?:and|or|nor) ))"
    rf"|(?<=\b(?:{CHOICE_NOUNS}|letter|choose|select) )([a-zI])(?![\w'])"
    # An A before a word is an article, unless the word belongs to a statement.
    rf"|(?<![\w'{{])(A)(?![\w'])(?! (?!(?:is|was|are|and|or|nor|but|not|{REASONS}|must|can|cannot|could|would"
    r"|should|may|might|does|has|rather|instead|so)\b)[a-z])"
)
# "(A) {A}" is one name, [A], and "(A) {B}" a contradiction. "(A). {B} is wrong" is two clauses.
_AN: Final = f"(?:(?:{ARTICLES}) )?"
_BETWEEN: Final = f"[ .:,(=\u2013\u2014-]*{_AN}"
_SAME_NAME: Final = re.compile(
    rf"(?:\(([A-Z])\){_BETWEEN}\{{\1\}}\)?|{_AN}\{{([A-Z])\}} ?\((?:(?:{CHOICE_NOUNS}) \()?\2\))"
    rf"(?= *(?:[.,;:!)]|$)| (?:is|was|must|would|should|can|cannot|{REASONS}|so|but|and|or|rather)\b)",
    re.IGNORECASE,
)
_OTHER_NAME: Final = re.compile(
    rf"\([A-Z]\){_BETWEEN}\{{[A-Z]\}}\)?(?= *(?:[.,;!)]|$))|\{{[A-Z]\}} ?\([A-Z]\)|[0-9][,;] \{{[A-Z]\}}", re.IGNORECASE
)
_ARTICLE_AT_START: Final = re.compile(r"(?:^|(?<=[.:;)] ))A (?=\{[A-Z]\})")
# "The animal is a dog" and "There are 3 cars" name an option if their other words are from the question.
_DESCRIPTION: Final = re.compile(r"([^(){}\[\]]*)(?<!\S)[{\[]([A-Z])[}\]]((?:[ \u4e00-\u9fff][^(){}\[\]]*)?)")
_DESCRIBING: Final = re.compile(r" *(?:[^\W\d_][\w'-]*(?: [0-9]+)?(?: +|$))*")
# Words that count only if the question has them: "the animal by the {B}" does not say which it is.
_IF_ASKED: Final = re.compile(
    r"(?<!ed )\bby\b|\b(?:at|for|with|from)\b|(?<!\w\w\ws )(?<!ed )(?<!ing )\bto(?= (?:the )?\{)"
    rf"|\b(?:is|are|was|were|been?) \w+ed\b(?! by {_AN}\{{)|\b(?:has|have|had|does|do|did|can(?! see| be seen))\b"
)
# "The cup is left of the fork" does not say what is left of the cup.
_RELATION: Final = re.compile(r"\b(?:of|than|above|below|behind|under|over|before|after|beside|\w+ing|\w+ed)\b")
# Options in one line, and what is chosen from.
_ENUMERATION: Final = re.compile(
    r"(?:^|(?<=[.:;!] ))(?:(?:the )?(?:options|choices)(?: are)?:? )?\(A\)[.:]* ?\{A\}"
    r"(?:[,;.]? \(([B-Z])\)[.:]* ?\{\1\})+[,.;:!]* ?|\b(?:out of|among)(?: all)?(?: the)?(?: options| choices)?:? "
    r"\([A-Z]\)(?:,? (?:and |or )?\([A-Z]\))+,? ?",
    re.IGNORECASE,
)
_CHINESE_WORD: Final = re.compile("[\u4e00-\u9fff]+")
_MARKED: Final = re.compile(r"[({\[]([A-Z])[)}\]]")

_NAME: Final = rf"(?:(?:the )?(?:{CHOICE_NOUNS}|letter)s? )?(?:[(\[][A-Z][)\]]|{_AN}\{{[A-Z]\}})"
_NAMES: Final = rf"(?:both |either |all of )?{_NAME}(?:(?: ?[/&,] ?| and | or | nor |, (?:and|or|nor) ){_NAME})*"
_ADJECTIVE: Final = (
    r"(?:only|single|final|correct|right|best|true|proper|valid|appropriate"
    r"|most (?:likely|appropriate|accurate|suitable))"
)
# "The right answer" and "B is right" do not name an option whose text is "Right".
_GRADE: Final = (
    rf"\b{_ADJECTIVE} (?:{_ADJECTIVE} )*(?:{CHOICE_NOUNS}|response|match)\b"
    rf"|(?-i:\b[A-Z]\)?) (?:is|was|seems|looks|appears)(?: to be)? (?:the )?{_ADJECTIVE}\b"
)
_SUBJECT: Final = (
    rf"(?:(?:the|my|our) )?(?:{_ADJECTIVE} )*(?:{CHOICE_NOUNS}|ans|solution|letter|response|match|one)"
    r"(?: (?:to|for|of) (?:the|this) (?:question|image|picture))?"
)
_BE: Final = r"(?:is|was|(?:would|should|must|has to|will|can only) be|(?:seems|looks|appears)(?: like| to be)?)"
_ADVERB: Final = r"(?:(?:clearly|definitely|certainly|undoubtedly|indeed|obviously|therefore|thus|simply|surely|then) )"
_CHOOSE: Final = rf"(?:{CHOICE_VERBS}|chose|picked|selected|(?:going|went) with|say|answer|take|(?:opt|vote) for)"
_LEAD: Final = (
    rf"(?:{_ADVERB}|so |and |only |hence |yes |finally |this means (?:that )?"
    r"|(?:(?:i|we) (?:conclude|know)|(?:i am|i'm) (?:sure|certain|confident)|it (?:seems|appears)) (?:that )?"
    r"|(?P<thinks>(?:i|we) (?:think|believe) (?:that )?))*"
)
_FIRM_STATEMENTS: Final = tuple(
    re.compile(_LEAD + pattern, re.IGNORECASE)
    for pattern in (
        rf"{_SUBJECT}(?: ?(?:{_BE}|[:=]|-+>))* ?{_ADVERB}*(?P<name>{_NAME})",
        rf"(?P<name>{_NAME}) (?:{_BE}|it is|fits) ?{_ADVERB}*(?:(?:the|my) )?(?:{_ADJECTIVE} ?)*"
        rf"(?:{CHOICE_NOUNS}|match|one)?",
        rf"(?:(?:(?:i|we)(?:'d| would|'ll| will| must|'m| am|'re| are)?|let's) )?{_CHOOSE} (?P<name>{_NAME})",
    )
)
_PLAIN_STATEMENT: Final = re.compile(
    rf"{_LEAD}(?:(?:(?:it|that|this)(?:'s| {_BE})|{_BE}|(?:(?:that|which|this) )?leav(?:es|ing)(?: only)?) {_ADVERB}*)?"
    rf"(?P<name>{_NAME})(?: one)?",
    re.IGNORECASE,
)
_NOT: Final = r"(?:not|n't|never|cannot)"
_DENIALS: Final = tuple(
    re.compile(_LEAD + pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:(?:{_SUBJECT}|(?:it|that|this)(?:'s)?|i|we) ?)?"
        rf"(?:(?:is|was|ca|can|could|must|should|would|will|wo|do|does|did)? ?{_NOT}"
        r"|(?:is )?(?:neither|none of)|rul(?:e|es|ed|ing) out|eliminat\w+|exclud\w+|reject\w*"
        r"|rather than|instead of|over)"
        rf"(?: be| {_CHOOSE}| (?:think|believe) (?:that )?(?:it|the answer) is)?(?: either)? (?P<names>{_NAMES})"
        rf"(?: (?:{_BE}|are) {_ADJECTIVE})?",
        rf"(?:neither|no) (?P<names>{_NAMES})[^()[\]{{}}]*",
        rf"(?P<names>{_NAMES}) [^()[\]{{}}]*(?:\b{_NOT}|n't|\b(?:{WRONG}|impossible|invalid|inaccurate"
        r"|eliminated|excluded|rejected|ruled out))\b[^()[\]{}]*",
    )
)
_IS_NOT: Final = re.compile(rf"(?P<subject>.+ )(?:is|are|was|were)(?: not|n't) (?P<names>{_NAMES})", re.IGNORECASE)
# "Neither A, B nor C" is one clause. "- {B}" may be a negative number.
_LISTED_NAMES: Final = re.compile(rf"{_NAME}(?:, {_NAME})+,? (?:and|or|nor) {_NAME}", re.IGNORECASE)
_CLAUSE_END: Final = re.compile(
    r"(?P<sentence>[.;!]+(?= |$))|,(?= )| [-\u2013\u2014]+ (?!\{)|(?<!is)(?<!er)(?<!on)(?<!ce):(?= )"
    rf"|\b(?P<reason>{REASONS}|given|due to|while|whereas)\b|\b(?:but|{CONCLUSIONS})\b"
    r"| and (?=not )|(?<!^is)(?<!, is) (?=(?:rather than|instead of|over|not) [({\[])",
    re.IGNORECASE,
)
_ALTERNATIVE: Final = re.compile(
    rf"\b(?:or|{HEDGES}|possible|could|may|might|also|either|both|too|likely|plausible|equally|unless|if"
    r"|except|other than)\b",
    re.IGNORECASE,
)
_RETRACTION: Final = re.compile(
    r"or$|(?:if|unless)\b"
    rf"|(?:(?:it|this|that|which)(?:'s| is) )?(?:not (?:right|correct|true)|{WRONG})\b"
    r"|(?:none of (?:these|them|the (?:above|options|choices|answers))|no (?:option|choice|answer))\b"
    rf"|{_SUBJECT} (?:is not|isn't) (?:listed|given|here|among|one of)\b",
    re.IGNORECASE,
)
# After "wait" or "no", only what follows counts.
_CORRECTION: Final = re.compile(
    r"(?:^|[.,;!?\u2026\u2013\u2014-]+ ?)(?:no(?= wait|[,.;!\u2026-]|$)|(?:wait|actually|sorry|i mean|hmm+)\b)",
    re.IGNORECASE,
)
_OTHER_TEXT: Final = re.compile(
    rf"((?:(?!(?:in|on|by|to|from|of|no|not) |(?:{CONCLUSIONS}|overall|\w+ly)[,;.])[a-z'-]+(?: [a-z'-]+)?[,;.] )+)"
    rf"{_AN}\{{[A-Z]\}}[.!]?",
    re.IGNORECASE,
)
_ALL_BUT: Final = re.compile(r"\?|\b(?:all|any\w*|every\w*) but\b|\b(?:none of|neither) [({\[].[)}\]],", re.IGNORECASE)


def read_choice(answer: str, question: str) -> Sequence[str]:
    """Return the letters of the option that an answer names, none if it does not name one option.

    More than one letter is returned only if their options have equal texts.
    """
    options = parse_options(question)
    known_letters = options or ascii_uppercase
    if len({letter for letter, _ in _LISTED_OPTION.findall(answer)}) > 1:
        answer = _LISTED_OPTION.sub("", answer)  # options checked one by one; what counts comes after them
    plain = _DEGREES.sub("\u00b0", strip_markup(answer.replace("\n", " ; ")).strip("; "))
    plain = _NOT_IN_BRACKETS.sub(r", \1", _THAT_IS.sub("", plain))
    if not options:
        plain = _UNLISTED.sub(r"\g<0>. ", plain)  # "(B) red" without options to compare with
    letter = _LETTER.fullmatch(plain)
    if letter and letter[1].upper() in known_letters:
        return (letter[1].upper(),)
    same_text = _options_with_text(answer, options)
    if not same_text and not plain.isascii():
        same_text = _options_with_text(to_english(plain), options)
    if same_text:
        return same_text
    named = _stated_letter(_mark_names(plain, options), options, question)
    if named is None or named not in known_letters:
        return ()
    return _options_with_text(options[named], options) if options else (named,)


@lru_cache(maxsize=4096)
def parse_options(question: str) -> Mapping[str, str]:
    """Return the text of each option as written, by its letter, from the last list of options in the question.

    The list ends where the letters A, B, C, ... break off. The result is empty if it has fewer than two options.
    """
    plain = question.replace("**", "").translate(_STRAIGHT)
    lines = [(letter.upper(), text) for letter, text in _LISTED_OPTION.findall(plain)]
    # Examples of other questions may come first, so the last list is the question's own.
    starts = [index for index, (letter, _) in enumerate(lines) if letter == "A"]
    last_list = lines[starts[-1] :] if starts else []
    options: dict[str, str] = {}
    for (letter, text), expected_letter in zip(last_list, ascii_uppercase, strict=False):
        if letter != expected_letter:
            break
        options[letter] = text.strip()
    return options if len(options) > 1 else {}


@lru_cache(maxsize=4096)  # siblings share their options, and often their answers
def strip_markup(text: str) -> str:
    """Return a text without Markdown, LaTeX and quotes, with ASCII's punctuation and single spaces."""
    plain = _EXPONENT.sub(r"\1", _DEGREE.sub("°", text.translate(_STRAIGHT)))
    # Repeated for a fraction of units in bold within a box.
    for _ in range(4 if "\\" in plain else 2):
        plain = _FRACTION.sub(r"\1/\2", _MARKUP.sub(lambda match: match[match.lastindex or 0], plain))
    return " ".join(_QUOTE.sub("", _LATEX_SPACE.sub(" ", plain)).split())


def _options_with_text(text: str, options: Mapping[str, str]) -> Sequence[str]:
    """Return the letters of the options that have this text, as written or as little changed as tells them apart."""
    for fold in (str.strip, strip_markup, _normalize, _drop_article, _squeeze):
        folded = fold(text)
        letters = tuple(letter for letter, option in options.items() if fold(option) == folded)
        if letters:
            return letters if len({options[letter] for letter in letters}) == 1 else ()
    return ()


def _mark_names(answer: str, options: Mapping[str, str]) -> str:
    """Return the answer with every letter as (B) and every text of an option as {B}."""
    answer = answer.replace("{", " ").replace("}", " ")
    spellings: set[str] = set()
    predicates: dict[str, str] = {}  # letters by "is empty" for "It is empty"
    for letter, option in options.items():
        text = _drop_article(option)
        number, _, things = text.partition(" ")
        in_words = f"{_NUMBER_WORDS.get(number, number)} {things}".strip()
        predicates[re.sub(r"^(?:it|he|she|they) (?=\w+ \w)", "", text)] = letter
        spellings |= {text, _ARTICLE.sub("", strip_markup(option)), in_words, *predicates}
    # The longest text first, since it may contain another. A single letter of A to Z is always read as a letter.
    texts = [text for text in spellings if len(text) > 1 or (text and not (text.isascii() and text.isalpha()))]
    if texts:
        grade = _GRADE if any(re.fullmatch(_ADJECTIVE, text) for text in texts) else "(?!)"
        alternatives = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        # Chinese has no spaces between words.
        pattern = re.compile(
            rf"({grade})|(?<![^\W\u4e00-\u9fff])(?:{alternatives})(?![^\W\u4e00-\u9fff])", re.IGNORECASE
        )

        def mark(match: re.Match[str]) -> str:
            if match[1]:  # a grade of an answer
                return match[1]
            letters = _options_with_text(match[0], options) or predicates.get(match[0].casefold(), "?")
            return f"{{{letters[0]}}}"

        answer = pattern.sub(mark, answer)
    answer = _ARTICLE_AT_START.sub("", answer)
    return _LETTER_IN_TEXT.sub(lambda match: f"({match[match.lastindex or 0].upper()})", to_english(answer))


def _stated_letter(marked: str, options: Mapping[str, str], question: str) -> str | None:
    """Return the letter of the only option that a marked answer names; None if it names none, or several."""
    marked = _ENUMERATION.sub("", marked)
    marked = _CORRECTION.split(_SAME_NAME.sub(lambda match: f"[{match[1] or match[2]}]", marked))[-1]
    marked = _LISTED_NAMES.sub(lambda match: re.sub(r",(?! (?:and|or|nor)) ", "/", match[0]).replace(",", ""), marked)
    if _ALL_BUT.search(marked) or _OTHER_NAME.search(marked) or _has_other_text(marked, question):
        return None
    stated, described, denied = set[str](), set[str](), set[str]()
    others: list[str] = []  # clauses that name options and are neither statement nor denial
    is_firm = False
    last = ""  # the letter that the clause before states or describes
    for clause, is_reason in _split_clauses(marked):
        denial, firm = _match_any(_DENIALS, clause), _match_any(_FIRM_STATEMENTS, clause)
        statement = firm or _PLAIN_STATEMENT.fullmatch(clause)
        if denial:
            denied.update(_MARKED.findall(denial["names"]))
        # "I think it is {B}" describes the picture, where "I think it is (B)" answers.
        elif statement and not (statement["thinks"] and "{" in statement["name"]):
            last = _MARKED.findall(statement["name"])[0]
            stated.add(last)
            is_firm = is_firm or firm is not None
        elif is_reason:
            continue
        elif _RETRACTION.match(clause) or is_doubtful(clause.casefold()):
            return None
        elif _MARKED.search(clause):
            is_not = _IS_NOT.fullmatch(clause)
            if is_not and _is_of_question(is_not["subject"], question):
                denied.update(_MARKED.findall(is_not["names"]))
            else:
                others.append(clause)
            letter = _described_letter(clause, question)
            described.update(letter)
            last = letter or last
        elif last in options and not _SENTENCE.match(clause) and not _is_part(clause, options[last]):
            return None  # "B. purple", where purple is not in the text of B
        else:
            last = ""
    stated = stated or described
    rivals = [clause for clause in others if set(_MARKED.findall(clause)) - stated]
    if rivals and (not is_firm or any(map(_ALTERNATIVE.search, rivals))):
        return None
    return stated.pop() if len(stated) == 1 and not stated & denied else None


def _has_other_text(marked: str, question: str) -> bool:
    """Return True for "purple, {B}": words of no option and not of the question before the text of an option."""
    match = _OTHER_TEXT.fullmatch(marked)
    text = match[1].strip(" ,;.") if match else ""
    return bool(content_words(text.casefold())) and not (_SENTENCE.match(text) or _is_of_question(text, question))


def _match_any(patterns: Sequence[re.Pattern[str]], clause: str) -> re.Match[str] | None:
    """Return the match of the first pattern that a whole clause has."""
    return next(filter(None, (pattern.fullmatch(clause) for pattern in patterns)), None)


def _described_letter(clause: str, question: str) -> str:
    """Return B for "the animal is a {B}", whose other words are common or of the question; "" for others."""
    description = _DESCRIPTION.fullmatch(clause)
    asked, plain = asked_in(question), IN_IMAGE.sub("", clause.casefold())
    # "The animal shown is a {B}" does not say which one is not shown.
    if description is None or " not " in asked or any(f" {word} " not in asked for word in _IF_ASKED.findall(plain)):
        return ""
    before, letter, after = description.groups()
    is_counted = len(after) > 1 and after[0] in MEASURES and names_thing(after[1:], question)  # {B}辆车
    others = before if is_counted else f"{before} {after}"
    return letter if _is_of_question(others, question) and _keeps_order(others.casefold(), asked) else ""


def _is_of_question(text: str, question: str) -> bool:
    """Return True if a text has no words of denial, and of others only common ones and those of a question."""
    plain = text.casefold().replace("=", " is ")
    if is_denied(plain) or not _DESCRIBING.fullmatch(plain):
        return False
    is_chinese = all(word.strip("\u7684") in question for word in _CHINESE_WORD.findall(plain))
    return is_chinese and {*content_words(plain)} <= {*content_words(question.casefold())}


def _keeps_order(text: str, asked: str) -> bool:
    """Return True unless the words of what is asked change places beside a relation, or beside a changed ending.

    "By" reverses them: "the dog is chased by {A}" says who chases it.
    """
    words = content_words(asked)
    places = [words.index(word) for word in content_words(text) if word in words]
    is_free = not _RELATION.search(text) and all(word in asked for word in text.split())
    return is_free or places == sorted(places, reverse=(" by " in f"{text} ") != (" by " in asked))


def _is_part(clause: str, option: str) -> bool:
    """Return True if all words of a clause are in the text of an option."""
    return {*_drop_article(clause).split()} <= {*_normalize(option).split()}


def _split_clauses(marked: str) -> Iterator[tuple[str, bool]]:
    """Yield the clauses of a marked answer, each with True if it is in a sentence after "because" or the like."""
    start, is_reason = 0, False
    for end in (*_CLAUSE_END.finditer(marked), None):
        text = marked[start : end.start() if end else len(marked)].strip(" .,:;!")
        if text:
            yield text, is_reason
        if end:
            start = end.end()
            is_reason = bool(end["reason"]) or (is_reason and not end["sentence"])


def _normalize(text: str) -> str:
    """Return the text without markup, case and final full stops."""
    return _DEGREES.sub("\u00b0", strip_markup(text)).casefold().rstrip(".!")


def _drop_article(text: str) -> str:
    """Return the normalised text without the article that it begins with."""
    return _ARTICLE.sub("", _normalize(text))


def _squeeze(text: str) -> str:
    """Return the normalised text without article and spaces, a number in words at its start as its digits."""
    plain = _drop_article(text)
    found = split_number(_normalize(text)) or split_number(plain)
    return f"{found[0]}{''.join(found[1])}" if found else plain.replace(" ", "")
