"""Code that runs on the device, in Triton's language: imported only where it is going to run."""
