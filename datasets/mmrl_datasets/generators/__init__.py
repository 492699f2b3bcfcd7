"""Datasets that are drawn by a program, with exact answers: scenes, digits, text, puzzles, charts and videos.

A sample depends only on the seed, the split and its index.

Options that all of them share:
    split: train, validation or test; no pixel of a photograph, handwriting or composition of one occurs in another.
    size: number of samples; null never ends.
    image_px: side of the square image or frame, where there is one.
    background: strength of the real texture behind what is drawn, 0 to 1.
    seed: fixes the samples; null takes the seed of the run.

The signatures give the ranges of options, which are checked when YAML or the command line names a generator. Options
that do not fit together are a UserError.
"""
