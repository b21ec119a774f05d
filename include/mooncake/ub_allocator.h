// Empty: memory of the UB fabric (USE_UB) is not offered.
#pragma once
