"""Reading and writing of JSON files with their schemas, and of times that a server measured."""
