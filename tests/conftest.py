from hypothesis import settings

# How long an example takes says nothing on a shared machine.
settings.register_profile("kvrelay", deadline=None)
settings.load_profile("kvrelay")
