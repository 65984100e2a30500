"""A page in the browser: who reads whom, pictures dense and sparse, results, retrieval. Gradio is in `page` alone."""
