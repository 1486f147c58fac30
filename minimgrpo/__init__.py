"""minimgrpo: multi-agent GRPO for a planner and an executor, small enough to read in an evening."""

__version__ = "0.1.0"
