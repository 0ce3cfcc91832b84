"""The endpoints, one file each: from a run and request parameters to bytes. Independent of HTTP; used by reports."""
