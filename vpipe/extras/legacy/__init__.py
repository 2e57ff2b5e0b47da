"""Read what users of VPipe and OurGPipe have: flat configs with their JSON files, old keys and options, stage files.
"""
