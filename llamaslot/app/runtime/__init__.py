"""The engine and the prompt worker: loaded and run in this process or in child processes, whose mains are here."""
