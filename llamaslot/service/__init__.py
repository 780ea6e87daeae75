"""The service: requests between the HTTP handlers, the prompt worker and the engine. Knows no HTTP and no model."""
