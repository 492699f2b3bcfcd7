"""A run in the browser: records become documents, and a page shows them (`mmrl view`)."""
