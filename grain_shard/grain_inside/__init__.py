"""Everything that looks at what Grain keeps private: hints for speed, each with a public path."""
