from parallm.errors import ParallmError as ParallmError
from parallm.library.answer import Answer as Answer
from parallm.library.model import Model as Model
from parallm.library.model import Server as Server
from parallm.library.model import load as load
from parallm.library.rl_server import LoRAConfig as LoRAConfig
from parallm.library.rl_server import RLConfig as RLConfig
from parallm.library.rl_server import RLServer as RLServer
from parallm.library.session import TrainingResult as TrainingResult
from parallm.library.training import Training as Training
from parallm.library.training import train as train
from parallm.library.training import training as training

__version__: str
__all__: list[str]
