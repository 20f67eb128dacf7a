"""Sources of records: files, arrays, sources that are asked twice, and mixtures of datasets."""
