"""Models, accelerators, clusters, training stacks and constants: data in TOML files, each number with its source."""
