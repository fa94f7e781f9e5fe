"""stub"""


class AdaptiveDataParallel: ...
