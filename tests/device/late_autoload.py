"""Importing this makes the late device torch's, as ``torch_npu`` makes Ascend's."""

import late_device

late_device.load()
