"""The backends that come with ggmlb: one folder each, imported by the registry when first needed."""
