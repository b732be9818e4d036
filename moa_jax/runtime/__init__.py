"""Devices, memory and processes: everything below the model that depends on the machine.

devices.py     platform and GPU generation that a program is traced for
precision.py   float32 matrix products in float32
memory.py      free bytes of a device, checked before arrays are allocated
multihost.py   several processes: broadcast, agreement, shutdown
rendezvous.py  sockets between the processes of a run
followers.py   messages from process 0 to the other processes
"""
