"""Images, partitions and availability: the code that all data sets, partitioners and participation patterns share."""
