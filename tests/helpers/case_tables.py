"""Case tables of the rewards that come with mmrl, run once in a process rather than at the start of every run.

Their rows are the same in each run, and `tests/unit/rewards` runs them all. Tables of rewards in files are run as ever.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from mmrl.config.schema import ScoringConfig
from mmrl.scoring import registry


def remember_checked_tables() -> Callable[[], None]:
    """Let runs of this process, and of those forked from it, leave out tables that have passed in it.

    Returns a function that ends this.
    """
    check = registry.check_case_tables
    passed: set[str] = set()

    def check_new_tables(names: Iterable[str], base: Path, options: ScoringConfig) -> None:
        new = [name for name in names if registry.qualified_name(name) not in passed]
        check(new, base, options)
        names = map(registry.qualified_name, new)
        passed.update(name for name in names if name.startswith("mmrl_rewards."))

    def restore() -> None:
        registry.check_case_tables = check

    registry.check_case_tables = check_new_tables
    return restore
