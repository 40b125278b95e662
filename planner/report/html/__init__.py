"""Self-contained HTML pages, their pictures, and the same pictures as files; needs the extra ``report``."""
