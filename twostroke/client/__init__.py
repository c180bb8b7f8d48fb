"""The engine as the API process sees it: tokens in, text out."""
