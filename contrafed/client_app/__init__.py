"""What runs on a client: the ClientApp and the files it keeps."""
