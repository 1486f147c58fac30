"""nbgrader reads this when it is started in this folder."""

c = get_config()  # noqa: F821 (nbgrader defines it)

c.CourseDirectory.course_id = "minimgrpo"
c.CourseDirectory.root = __file__.rpartition("/")[0] or "."
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\nraise NotImplementedError()"}
c.ExecutePreprocessor.timeout = 30  # seconds a cell; the checks themselves give up after 20
c.ExecutePreprocessor.interrupt_on_timeout = True
