"""Results and how they are shown: documents, tables, figures, pages and traces, each number with its source."""
