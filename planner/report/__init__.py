"""Results as people read them: one frame of named columns, printed as table, CSV, JSON or Markdown."""
