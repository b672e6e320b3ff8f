"""All scored plans of a run: a page in which one filters, sorts and compares them."""
