"""Run the forwards of a batch in a thread each, on a GPU in a stream each: OurGPipe's scheduler ``async_threaded``."""
