"""Data: samples are loaded, checked, put in an order, and encoded ahead of the step that trains on them."""
