"""The schedules of growth, one per file; `growth/__init__.py` lists them."""
