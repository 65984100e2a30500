"""Pictures: who reads whom, and what benchmarks measured. The only importer of matplotlib."""
