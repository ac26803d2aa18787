"""In and out: JSON files with their schemas, and what a real server measured."""
