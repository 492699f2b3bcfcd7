"""Settings: a strict schema, a loader that says what is wrong and where, and an explanation in words."""

from mmrl.config.diff import Change, changes
from mmrl.config.explain.config import explain
from mmrl.config.export import dump, json_schema
from mmrl.config.load import Loaded, cap_steps, exam_of, load, read_settings, settings
from mmrl.config.schema import Config, Exam

__all__ = [
    "Change",
    "Config",
    "Exam",
    "Loaded",
    "cap_steps",
    "changes",
    "dump",
    "exam_of",
    "explain",
    "json_schema",
    "load",
    "read_settings",
    "settings",
]
