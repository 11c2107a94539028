"""The benchmark of predictors: published rows as questions, answers of any predictor, and scores by kind.

Without torch and pandas, so that it works wherever the package is installed. docs/benchmark.md explains how to add a
predictor and how to add rows.
"""
