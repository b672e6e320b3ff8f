"""What an estimate looks like: tables, figures, pages and traces, each number with its source."""
