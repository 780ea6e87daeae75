"""Resources of the engine: models (`llama`, the only importer of llama_cpp), and files of KV and texts (`disk`)."""
