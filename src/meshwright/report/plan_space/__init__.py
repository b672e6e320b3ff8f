"""All scored plans of a run: rows for a table or a file, and a page in which one filters, sorts and compares them."""
