"""Environments and tasks of other packages. The core imports none of them: a recipe names an adapter, as in
`task.env: gymnasium`, and `config/schema.py` has the names."""
