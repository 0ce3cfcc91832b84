"""Results as HTML for notebooks. No script, nothing loaded, all text escaped; fits light and dark pages."""
