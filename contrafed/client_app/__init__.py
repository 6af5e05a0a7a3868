"""Code that runs on a client: the ClientApp, and the files that it keeps."""
