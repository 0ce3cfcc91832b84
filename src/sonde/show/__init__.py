"""Views of a run. Every view is built on `Run`, so that no two of them can disagree."""
