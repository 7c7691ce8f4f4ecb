"""Problems as data: one Harbor-valid folder each, and the exact judges and the registry that read them.

Boundary: knows nothing of sandboxes, models, stores or Temporal. A judge here gets bytes and returns a grade; how those bytes were
produced is not its business.
"""
