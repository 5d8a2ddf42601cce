"""A comparison of two runs in every format: text, Markdown, HTML, JUnit, SARIF and GitHub annotations."""
