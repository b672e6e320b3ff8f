"""Answers as they are shown: tables, figures, pages and notebooks, each number with its source."""
