// Nothing of its own: TransferEngine::showLinks() is in transfer_engine.h.
#pragma once
