"""Experiments: what co-training buys, measured with intervals (``python -m minimgrpo.experiments NAME``).

``setting`` describes one run, ``trainer`` makes it, ``pool`` makes many and remembers them, ``studies`` says what each
experiment claims and compares, ``verdicts`` decides by rules that were fixed before the runs, ``show`` draws.
"""
