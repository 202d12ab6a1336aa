"""Workers of a job: this process, or several on Ray, each with its own model."""
