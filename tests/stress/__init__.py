"""Load, storms and a soak, with exact accounts.

``python -m tests.stress [--seconds N] [--seed S] [NAME ...]`` runs all of it at full size, or the
parts that are named, and prints the seed and the figures of each part.  The seed decides what is
done to which engine and when; threads and processes take their turns as they like.
"""
