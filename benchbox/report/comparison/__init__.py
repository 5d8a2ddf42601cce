"""A comparison of two runs in every format: text, Markdown, HTML, JUnit and GitHub annotations."""
