"""Values of simple formulas against sympy, which reads none of their LaTeX here."""

import pytest
import sympy

from mmrl_rewards.arithmetic import compare, is_huge

FORMULAS = {
    r"\frac{1}{2}": "1/2",
    "2^{-1}": "1/2",
    r"1\frac{1}{2}": "3/2",
    r"-1\frac{1}{2}": "-3/2",
    r"2\sqrt{3}": "2*sqrt(3)",
    r"\sqrt{12}": "sqrt(12)",
    r"\sqrt[3]{27}": "3",
    r"\frac{\frac{6}{2}}{1}": "3",
    r"\frac{3\pi}{2}": "3*pi/2",
    r"1.5\pi": "Rational(3, 2)*pi",
    "x^2+2x+1": "x**2+2*x+1",
    "(x+1)^2": "(x+1)**2",
    "x(x-1)": "x*(x-1)",
    "x^2-x": "x**2-x",
    r"\frac{x^2-1}{x-1}": "(x**2-1)/(x-1)",
    "x+1": "x+1",
    "-x^2": "-x**2",
    "(-x)^2": "x**2",
    r"2\cdot 2^{n}": "2*2**n",
    "2^{n+1}": "2**(n+1)",
    "xy": "x*y",
    "yx": "x*y",
}


def test_two_formulas_are_equal_if_sympy_finds_no_difference():
    values = {text: sympy.expand(sympy.simplify(python)) for text, python in FORMULAS.items()}
    for first in FORMULAS:
        for second in FORMULAS:
            is_equal = sympy.expand(values[first] - values[second]) == 0
            assert compare(first, second, 6) is is_equal, (first, second)


@pytest.mark.parametrize(
    "formula",
    # in two readings, outside the grammar, without a value
    ["1/2x", "x/yz", "f(x)", "P(A)", "e", "2i", "a_1", "3 4", "x2", r"\sin x", r"\frac{dy}{dx}", "0^0", "1/0", "", "("],
)
def test_what_is_not_simple_is_left_undecided(formula):
    assert compare(formula, formula, 6) is None


def test_roots_of_negative_numbers_are_left_undecided():
    assert compare(r"\sqrt[3]{-8}", "-2", 6) is None


def test_numbers_that_may_be_equal_are_left_undecided():
    assert compare(r"\pi", r"\pi+10^{-30}", 6) is None
    assert compare(r"\pi", r"\pi+10^{-20}", 6) is False


@pytest.mark.parametrize(
    ("formula", "other"),
    [("1", "1+10^{-30}"), ("2^{2009}", "2^{2009}-1"), ("n^{2024}", "n^{2024}-1"), ("10^{999999999}", "10^{9}")],
)
def test_fractions_are_compared_exactly(formula, other):
    assert compare(formula, other, 6) is False


def test_roots_of_letters_are_compared_for_positive_letters():
    assert compare(r"\sqrt{ab}", r"\sqrt{a}\sqrt{b}", 6)
    assert not compare(r"\sqrt{x^2}", "x", 6)


def test_equations_are_compared_by_their_multiples():
    assert compare("y=2x+1", "4x-2y+2=0", 6)
    # Even in both letters, so one set of letters and its negative would not tell them apart.
    assert not compare(r"\frac{x^2}{4}+\frac{y^2}{9}=1", r"\frac{x^2}{9}+\frac{y^2}{4}=1", 6)


@pytest.mark.parametrize("tower", ["9^{9^{9^{9}}}", "9^{999}^{999}^{999}", "((9^{999})^{999})^{999}", "9^{9*9*9^{99}}"])
def test_towers_of_powers_return(tower):
    assert not compare(tower, "1", 6)


HUGE = ["1000000!", "(9!)!", r"\binom{1000000}{2}", "9^{9^{9}}", "10^{10^{10}}", "10^9^9", "e^{e^{e^{e}}}"]
HUGE += ["((9^{99})^{99})^{99}", r"10^{10\cdot10^{9}}", "10^{10!}", "(1+10^{-9})^{10^9}", "x^{10000}"]
NOT_HUGE = ["52!", r"\binom{52}{5}", "2^{100}", "10^{400}", "2^{3^{2}}", "e^{e^{x}}", "x^{2^n}", "x^{2023}"]


@pytest.mark.parametrize("formula", HUGE)
def test_a_number_or_power_of_thousands_of_digits_or_terms_is_huge(formula):
    assert is_huge(formula)


@pytest.mark.parametrize("formula", [*NOT_HUGE, "e^{0.12345}", "(x^2)^{3}", r"6.02\times10^{23}", r"\sum_{k=1}^{4}k"])
def test_a_number_that_sympy_computes_at_once_is_not_huge(formula):
    assert not is_huge(formula)
