"""What both schedulers are made of: the event loop, the device's protocol, queue order and admission of EXTEND."""
