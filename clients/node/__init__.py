"""What runs on a node: the ClientApp and the files it keeps."""
