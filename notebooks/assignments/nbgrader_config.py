"""nbgrader reads this when it is started in this folder."""

from pathlib import Path

c = get_config()  # noqa: F821 (nbgrader defines it)

c.CourseDirectory.course_id = "minimgrpo"
c.CourseDirectory.root = str(Path(__file__).resolve().parent)
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\nraise NotImplementedError()"}
c.ExecutePreprocessor.timeout = 30  # seconds for a cell; the checks themselves give up after 20
c.ExecutePreprocessor.interrupt_on_timeout = True  # and go on with the next cell
c.ExecutePreprocessor.iopub_timeout = 30  # a busy machine answers late, and nbgrader would give up after 4 seconds
