"""One file per answer: a run and the parameters of a request in, bytes out. No HTTP here; reports use them as well."""
